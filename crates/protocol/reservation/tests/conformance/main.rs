//! Every rule of the table by its clause. Clauses are those of SPC-4 r37, unless they say
//! otherwise.

mod capacity;
mod harness;
mod notifications;
mod nvme_register;
mod oracle;
mod power_cycle;
mod preempt;
mod random;
mod register;
mod register_and_move;
mod release;
mod reserve;
mod unit;
