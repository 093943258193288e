"""Forward values: where the first bad number was born, and what else went bad."""
