"""How often graders and judges agree with labelled answers: `alphaapollo audit-graders`."""
