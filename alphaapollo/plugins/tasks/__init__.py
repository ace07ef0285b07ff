"""Task folders of Harbor as data and environment, and the sandboxes in which agents work: `alphaapollo tasks`."""
