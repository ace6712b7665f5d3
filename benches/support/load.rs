//! The load: keep-alive HTTP/1.1 connections over loopback, one task each, on a thread and a
//! runtime of their own, with as little work per request as possible.

use std::{mem::MaybeUninit, net::SocketAddr, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::Instant,
};

use super::{options::Window, rounds::Sample};

/// What one connection asks for.
pub trait Client: Send + 'static {
    /// Puts the next request into the buffer.
    fn request(&mut self, buffer: &mut Vec<u8>);

    /// Looks at its answer.
    fn answered(&mut self, status: u16, body: &[u8]) -> Answered;
}

/// What an answer says about the operation.
pub enum Answered {
    /// It needs another request.
    Partly,
    Done,
    /// It was refused, as it may be. Counted apart.
    Refused,
    /// The bench is worth nothing.
    Unexpected,
}

/// Has each client ask and ask again, for as long as the window is. Gives the clients back.
pub fn drive<C: Client>(addr: SocketAddr, clients: Vec<C>, window: Window) -> (Sample, Vec<C>) {
    let thread = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        runtime.unwrap().block_on(drive_here(addr, clients, window))
    });
    match thread.join() {
        Ok(driven) => driven,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

async fn drive_here<C: Client>(
    addr: SocketAddr,
    clients: Vec<C>,
    window: Window,
) -> (Sample, Vec<C>) {
    let mut connections = vec![];
    for client in clients {
        connections.push((Connection::open(addr).await, client));
    }
    let from = Instant::now() + window.warm_up;
    let tasks: Vec<_> = connections
        .into_iter()
        .map(|(connection, client)| {
            tokio::spawn(ask_and_ask(connection, client, from, window.measured))
        })
        .collect();
    let (mut sum, mut clients) = (Sample::new(window.measured), vec![]);
    for task in tasks {
        let (sample, client) = task.await.expect("a connection failed");
        sum.latencies
            .add(&sample.latencies)
            .expect("the same bounds");
        sum.refused += sample.refused;
        sum.done += sample.done;
        clients.push(client);
    }
    (sum, clients)
}

async fn ask_and_ask<C: Client>(
    mut connection: Connection,
    mut client: C,
    from: Instant,
    measured: Duration,
) -> (Sample, C) {
    let until = from + measured;
    let mut sample = Sample::new(measured);
    let mut request = Vec::with_capacity(1_024);
    let mut began = Instant::now();
    while began < until {
        let outcome = loop {
            request.clear();
            client.request(&mut request);
            let (status, body) = connection.exchange(&request).await;
            match client.answered(status, body) {
                Answered::Partly => {}
                Answered::Unexpected => panic!(
                    "{} was answered {status}: {}",
                    String::from_utf8_lossy(&request),
                    String::from_utf8_lossy(body)
                ),
                outcome => break outcome,
            }
        };
        let ended = Instant::now();
        let within = from <= ended && ended < until;
        match outcome {
            Answered::Refused => sample.refused += u64::from(within),
            _ => {
                sample.done += 1;
                if within {
                    let took = (ended - began).as_nanos();
                    let took = u64::try_from(took).unwrap_or(u64::MAX);
                    sample.latencies.saturating_record(took);
                }
            }
        }
        began = ended;
    }
    (sample, client)
}

/// One connection, with one request at a time.
struct Connection {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Connection {
    async fn open(addr: SocketAddr) -> Self {
        let stream = TcpStream::connect(addr).await.expect("the server listens");
        stream.set_nodelay(true).expect("a socket");
        Self {
            stream,
            buffer: Vec::with_capacity(16 * 1_024),
        }
    }

    /// Sends a request, and reads its answer: status and body.
    async fn exchange(&mut self, request: &[u8]) -> (u16, &[u8]) {
        self.stream.write_all(request).await.expect("it was sent");
        self.buffer.clear();
        loop {
            let read = self.stream.read_buf(&mut self.buffer).await;
            assert!(read.expect("an answer") > 0, "the server closed");
            let Some((status, head, length)) = head_of(&self.buffer) else {
                continue;
            };
            while self.buffer.len() < head + length {
                let read = self.stream.read_buf(&mut self.buffer).await;
                assert!(read.expect("a body") > 0, "the server closed");
            }
            return (status, &self.buffer[head..head + length]);
        }
    }
}

/// Status, length of the head and length of the body, once the head is complete.
fn head_of(bytes: &[u8]) -> Option<(u16, usize, usize)> {
    let mut headers = [MaybeUninit::uninit(); 32];
    let mut response = httparse::Response::new(&mut []);
    let parsed = httparse::ParserConfig::default().parse_response_with_uninit_headers(
        &mut response,
        bytes,
        &mut headers,
    );
    let httparse::Status::Complete(head) = parsed.expect("an HTTP response") else {
        return None;
    };
    let mut length = 0;
    for header in response.headers.iter() {
        if header.name.eq_ignore_ascii_case("content-length") {
            let text = std::str::from_utf8(header.value).expect("a number");
            length = text.parse().expect("a number");
        }
        let chunked = header.name.eq_ignore_ascii_case("transfer-encoding");
        assert!(!chunked, "a body without Content-Length");
    }
    Some((response.code.expect("a status"), head, length))
}
