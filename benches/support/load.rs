//! The load generator: one task for each keep-alive connection over loopback, on a separate thread
//! and runtime, with as little work for each request as possible.

use std::{mem::MaybeUninit, net::SocketAddr, ops::Range};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use super::{
    options::Window,
    rounds::Sample,
    tasks::{self, Operation, Outcome},
};

/// The requests of one connection.
pub trait Client: Send + 'static {
    /// Writes the next request to the buffer.
    fn request(&mut self, buffer: &mut Vec<u8>);

    /// Evaluates the response.
    fn answered(&mut self, status: u16, body: &[u8]) -> Answered;

    /// Returns the status and the body of a response once it is complete.
    ///
    /// The default is HTTP/1.1.
    fn parse(bytes: &[u8]) -> Option<(u16, Range<usize>)> {
        parse_http(bytes)
    }
}

/// The meaning of a response for the operation.
pub enum Answered {
    /// The operation needs another request.
    Partly,
    Done,
    /// The operation was refused, as expected, and is counted separately.
    Refused,
    /// The response invalidates the bench.
    Unexpected,
}

/// Returns a function that runs each turn with the same clients.
pub fn turns<C: Client>(addr: SocketAddr, mut clients: Vec<C>) -> impl FnMut(Window) -> Sample {
    move |window| {
        let (sample, given_back) = drive(addr, std::mem::take(&mut clients), window);
        clients = given_back;
        sample
    }
}

/// Sends the requests of each client, one after the other, during the window, and returns the
/// clients.
pub fn drive<C: Client>(addr: SocketAddr, clients: Vec<C>, window: Window) -> (Sample, Vec<C>) {
    let thread = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        runtime.expect("a runtime").block_on(async {
            let mut connections = vec![];
            for client in clients {
                connections.push(Connection::open(addr, client).await);
            }
            tasks::run(connections, window).await
        })
    });
    match thread.join() {
        Ok((sample, connections)) => {
            let clients = connections.into_iter();
            (
                sample,
                clients.map(|connection| connection.client).collect(),
            )
        }
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

/// A connection with one request at a time.
struct Connection<C> {
    client: C,
    stream: TcpStream,
    request: Vec<u8>,
    answer: Vec<u8>,
}

impl<C: Client> Connection<C> {
    async fn open(addr: SocketAddr, client: C) -> Self {
        let stream = TcpStream::connect(addr).await.expect("the server listens");
        stream.set_nodelay(true).expect("a socket");
        Self {
            client,
            stream,
            request: Vec::with_capacity(1_024),
            answer: Vec::with_capacity(16 * 1_024),
        }
    }
}

impl<C: Client> Operation for Connection<C> {
    async fn run(&mut self) -> Outcome {
        loop {
            self.request.clear();
            self.client.request(&mut self.request);
            let sent = self.stream.write_all(&self.request).await;
            sent.expect("it was sent");
            self.answer.clear();
            let (status, body) = loop {
                let read = self.stream.read_buf(&mut self.answer).await;
                assert!(read.expect("an answer") > 0, "the server closed");
                if let Some(parsed) = C::parse(&self.answer) {
                    break parsed;
                }
            };
            let body = &self.answer[body];
            match self.client.answered(status, body) {
                Answered::Partly => {}
                Answered::Done => return Outcome::Done,
                Answered::Refused => return Outcome::Refused,
                Answered::Unexpected => panic!(
                    "{} was answered {status}: {}",
                    String::from_utf8_lossy(&self.request),
                    String::from_utf8_lossy(body)
                ),
            }
        }
    }
}

fn parse_http(bytes: &[u8]) -> Option<(u16, Range<usize>)> {
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
    let status = response.code.expect("a status");
    (bytes.len() >= head + length).then_some((status, head..head + length))
}
