//! Rules one by one, and the search of all that can happen at small scope.

mod check;
mod driver;
mod rules;
mod search;
mod world;
