"""Tables and figures about retention horizons and checkpoint sizes."""
