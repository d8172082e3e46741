"""How each model family spells its configuration."""
