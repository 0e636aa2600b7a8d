"""What notebooks show with: tables, plots, the scorecard, figures."""
