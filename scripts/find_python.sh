#!/bin/sh
# Print the path of a Python >= 3.12 that can make virtual environments, or say that there is none.
set -u

suits='import sys, venv, ensurepip; assert sys.version_info >= (3, 12); print(sys.executable)'
for candidate in "${PYTHON:-}" python3.12 python3.13 python3.14 python3 python \
    "$HOME"/.pyenv/versions/3.12*/bin/python "$HOME"/.pyenv/versions/3.1[34]*/bin/python; do
    [ -n "$candidate" ] || continue
    if found=$("$candidate" -c "$suits" 2>/dev/null); then
        echo "$found"
        exit 0
    fi
done

cat >&2 <<'MESSAGE'
No Python 3.12 or newer with the venv module was found.
Install one (Debian and Ubuntu: python3.12 and python3.12-venv; elsewhere: pyenv install 3.12),
or name one: make PYTHON=/path/to/python3.12 ...
MESSAGE
exit 1
