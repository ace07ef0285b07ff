"""Check a recorded update against an independent reference (docs/verify.md)."""
