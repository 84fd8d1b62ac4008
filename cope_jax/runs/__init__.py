"""Opens, locks and loads the folders of runs, starts runs from models, and trains grids."""
