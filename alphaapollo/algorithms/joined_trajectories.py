"""Earlier place of JoinedTrajectories."""

from alphaapollo.algorithms.statistics import JoinedTrajectories as JoinedTrajectories
