//! Clients, processes, connections and servers that fail under load, and faults that no other test
//! detects.

mod cancellation;
mod lost_answers;
