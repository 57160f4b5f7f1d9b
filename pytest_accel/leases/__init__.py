"""Who may use what: the policy, the broker that applies it, the locks between sessions."""
