//! Assembles a node: configuration, store, REST API, metrics.
