//! Clients, processes, connections and servers that fail under load, and the harm that nothing else
//! catches.

mod cancellation;
mod lost_answers;
