//! Clients that acquire and release locks over HTTP, from the issuer and from etcd.

use std::io::Write;

use base64::{Engine, engine::general_purpose::STANDARD};

use crate::support::load::{Answered, Client};

/// Writes a POST or a DELETE with these header lines and this body.
fn write_request(buffer: &mut Vec<u8>, line: &str, headers: &str, body: &str) {
    let length = body.len();
    let written = write!(
        buffer,
        "{line} HTTP/1.1\r\nHost: bench\r\n{headers}Content-Length: {length}\r\n\r\n{body}"
    );
    written.expect("memory can be written");
}

/// An observer of a client's progress. It also sets how long the client waits for the lock.
pub trait Watch: Send + 'static {
    const WAIT_MS: u64;

    fn granted(&self) {}
    fn releases(&self) {}
}

/// The observer of a client whose locks no other client requests.
pub struct Alone;

impl Watch for Alone {
    const WAIT_MS: u64 = 0;
}

/// A client of the issuer, which sends `POST` and `DELETE`.
pub struct Issuer<W> {
    names: Vec<String>,
    next: usize,
    held: Option<String>,
    watch: W,
}

impl<W> Issuer<W> {
    pub const fn new(names: Vec<String>, watch: W) -> Self {
        Self {
            names,
            next: 0,
            held: None,
            watch,
        }
    }
}

impl<W: Watch> Client for Issuer<W> {
    fn request(&mut self, buffer: &mut Vec<u8>) {
        let name = &self.names[self.next];
        if let Some(id) = &self.held {
            self.watch.releases();
            let headers = format!("Lease-Id: {id}\r\n");
            write_request(buffer, &format!("DELETE /locks/{name}"), &headers, "");
        } else {
            let wait_ms = W::WAIT_MS;
            let body = format!("{{\"ttl_ms\":60000,\"wait_ms\":{wait_ms}}}");
            let headers = "Content-Type: application/json\r\n";
            write_request(buffer, &format!("POST /locks/{name}"), headers, &body);
        }
    }

    fn answered(&mut self, status: u16, body: &[u8]) -> Answered {
        match (&self.held, status) {
            (None, 201) => {
                self.watch.granted();
                self.held = member(body, "lease_id");
                self.held
                    .as_ref()
                    .map_or(Answered::Unexpected, |_| Answered::Partly)
            }
            (Some(_), 204) => {
                self.held = None;
                self.next = (self.next + 1) % self.names.len();
                Answered::Done
            }
            _ => Answered::Unexpected,
        }
    }
}

/// The use of etcd leases by a client.
#[derive(Clone, Copy, PartialEq)]
pub enum Session {
    /// A lease for each lock, which is revoked to unlock.
    ForEachLock,
    /// One lease for all locks, as in etcd's own client libraries.
    Kept,
}

/// A client of etcd's locks, through the JSON gateway of etcd.
pub struct Etcd<W> {
    names: Vec<String>,
    next: usize,
    session: Session,
    lease: Option<u64>,
    key: Option<String>,
    watch: W,
}

impl<W> Etcd<W> {
    pub fn new(names: &[String], session: Session, watch: W) -> Self {
        Self {
            names: names.iter().map(|name| STANDARD.encode(name)).collect(),
            next: 0,
            session,
            lease: None,
            key: None,
            watch,
        }
    }
}

impl<W: Watch> Client for Etcd<W> {
    fn request(&mut self, buffer: &mut Vec<u8>) {
        let (path, body) = match (self.lease, &self.key) {
            (None, _) => ("lease/grant", "{\"TTL\":86400}".to_owned()),
            (Some(lease), None) => {
                let name = &self.names[self.next];
                (
                    "lock/lock",
                    format!("{{\"name\":\"{name}\",\"lease\":{lease}}}"),
                )
            }
            (Some(lease), Some(key)) => {
                self.watch.releases();
                match self.session {
                    Session::ForEachLock => ("lease/revoke", format!("{{\"ID\":{lease}}}")),
                    Session::Kept => ("lock/unlock", format!("{{\"key\":\"{key}\"}}")),
                }
            }
        };
        write_request(buffer, &format!("POST /v3/{path}"), "", &body);
    }

    fn answered(&mut self, status: u16, body: &[u8]) -> Answered {
        if status != 200 {
            return Answered::Unexpected;
        }
        if self.lease.is_none() {
            self.lease = member(body, "ID").and_then(|id| id.parse().ok());
            return self
                .lease
                .map_or(Answered::Unexpected, |_| Answered::Partly);
        }
        if self.key.is_none() {
            self.watch.granted();
            self.key = member(body, "key");
            let locked = self.key.as_ref();
            return locked.map_or(Answered::Unexpected, |_| Answered::Partly);
        }
        self.key = None;
        if self.session == Session::ForEachLock {
            self.lease = None;
        }
        self.next = (self.next + 1) % self.names.len();
        Answered::Done
    }
}

/// Returns the string value of a member of a JSON object.
fn member(body: &[u8], name: &str) -> Option<String> {
    let text = std::str::from_utf8(body).ok()?;
    let (_, rest) = text.split_once(&format!("\"{name}\":\""))?;
    let (value, _) = rest.split_once('"')?;
    Some(value.to_owned())
}
