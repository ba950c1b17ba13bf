"""What a run or a comparison says: tables, figures, words, one page."""
