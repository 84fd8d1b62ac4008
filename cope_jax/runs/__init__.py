"""Opens, locks and loads the folders of runs, starts a run from another model, and trains a grid of
runs.
"""
