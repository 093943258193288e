"""An ordinary training script with a real fault, for `gradaudit demo`. Nothing in it knows gradaudit."""
