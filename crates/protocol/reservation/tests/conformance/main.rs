//! Every rule of the table by its clause. Clauses are those of SPC-4 r37, unless they say
//! otherwise.

mod enlist;
mod era;
mod moving;
mod notices;
mod oracle;
mod preempt;
mod random;
mod register;
mod release;
mod reserve;
mod room;
mod unit;
mod world;
