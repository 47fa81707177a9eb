def tokenizer_files(p): return []
