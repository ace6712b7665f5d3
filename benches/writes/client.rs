//! The requests that the connections send.

use std::{
    io::Write,
    sync::atomic::{AtomicI64, Ordering::Relaxed},
};

use tower_fence::{Resource, Token, TokenKeys};

use super::apps::{Carries, HIGHEST, token_keys};
use crate::support::load::{Answered, Client};

/// The next token for any resource.
static TOKENS: AtomicI64 = AtomicI64::new(1);

pub fn next_token() -> i64 {
    TOKENS.fetch_add(1, Relaxed)
}

/// The decrements that one connection requests.
pub struct Writer {
    path: String,
    carries: Carries,
    /// The resources of this connection. No other connection writes to them, unless there is only
    /// one resource.
    skus: Vec<String>,
    one_token: i64,
    keys: TokenKeys,
    shared: bool,
}

impl Writer {
    /// Returns the writers of all connections to one contender.
    ///
    /// Each writer has its own resources, so its tokens arrive in order.
    pub fn all(path: &str, carries: Carries, skus: &[String], connections: usize) -> Vec<Self> {
        let one_token = next_token();
        let writer = |n: usize| Self {
            path: path.to_owned(),
            carries,
            skus: if skus.len() < connections {
                skus.to_vec()
            } else {
                skus.iter().skip(n).step_by(connections).cloned().collect()
            },
            one_token,
            keys: token_keys(),
            shared: skus.len() < connections,
        };
        (0..connections).map(writer).collect()
    }
}

impl Client for Writer {
    fn request(&mut self, buffer: &mut Vec<u8>) {
        let sku = &self.skus[rand::random_range(0..self.skus.len())];
        let path = &self.path;
        let token = match self.carries {
            Carries::Nothing => 0,
            Carries::NewToken | Carries::NewTokenAndKey | Carries::SignedToken => next_token(),
            Carries::OneToken => self.one_token,
            Carries::StaleToken | Carries::ForgedToken => 1,
        };
        let written = write!(buffer, "POST {path}/{sku} HTTP/1.1\r\nHost: bench\r\n");
        let written = written.and_then(|()| match self.carries {
            Carries::Nothing => Ok(()),
            Carries::NewTokenAndKey => write!(
                buffer,
                "Fencing-Token: {token}\r\n\
                 Idempotency-Key: \"6f1d2c7a-0b6e-4c7b-8d55-{token:012}\"\r\n"
            ),
            Carries::SignedToken => {
                let resource = Resource::new(sku).expect("a name");
                let token = Token::new(token).expect("a token");
                let signed = self.keys.sign(&resource, token);
                write!(buffer, "Fencing-Token: {signed}\r\n")
            }
            Carries::ForgedToken => write!(
                buffer,
                "Fencing-Token: {HIGHEST};resource=\"{sku}\";key=\"k1\";mac=:AAAAAAAAAAAAAAAAAAAAAA==:\r\n"
            ),
            _ => write!(buffer, "Fencing-Token: {token}\r\n"),
        });
        written.expect("memory can be written");
        buffer.extend_from_slice(b"Content-Length: 0\r\n\r\n");
    }

    fn answered(&mut self, status: u16, _body: &[u8]) -> Answered {
        match (self.carries, status) {
            (Carries::StaleToken, 412) => Answered::Done,
            (Carries::ForgedToken, 403) => Answered::Done,
            (Carries::StaleToken | Carries::ForgedToken, _) => Answered::Unexpected,
            (_, 204) => Answered::Done,
            // Several connections write to this resource, and a request with a newer token arrived
            // first.
            (Carries::NewToken, 412) if self.shared => Answered::Refused,
            _ => Answered::Unexpected,
        }
    }
}
