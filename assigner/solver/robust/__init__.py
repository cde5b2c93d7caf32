"""How a plan holds up when its measurements were off."""
