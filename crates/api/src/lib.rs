//! The REST API, typed once: types and client.
