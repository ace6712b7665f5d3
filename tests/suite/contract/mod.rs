//! The contract: its vectors, and the addresses that answers name.

mod documentation;
mod spec;
