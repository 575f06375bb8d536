//! Rules one by one, and the search of all that can happen at small scope.
