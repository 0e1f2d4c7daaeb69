"""What the papers' methods rest on, measured on a user's model and prompts. Data only; the modules `plots_*` draw."""
