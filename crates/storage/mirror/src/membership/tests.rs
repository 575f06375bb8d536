//! Single rules, and an exhaustive search at small scope.

mod check;
mod driver;
mod rules;
mod search;
mod world;
