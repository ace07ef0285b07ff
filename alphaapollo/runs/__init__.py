"""What every run of a training has around its iterations: checkpoints behind them, who watches over it, restarts."""
