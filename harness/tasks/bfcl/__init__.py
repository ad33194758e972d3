"""The Berkeley Function Calling Leaderboard: its single-turn questions, asked and judged."""
