"""Who may do what: keys, tokens, tickets and the roles behind them."""
