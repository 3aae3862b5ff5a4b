"""What any kind of rollout engine has to do, asked of every kind by one suite."""
