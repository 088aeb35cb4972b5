"""`penstock up`: the whole cloud as children of one supervisor, in one data folder."""
