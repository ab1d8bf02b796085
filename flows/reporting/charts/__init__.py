"""The charts of reports, as SVG, for light pages and dark ones."""
