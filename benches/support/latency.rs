//! A simulated network between the service and its database. A proxy delays the responses of the
//! database.

use std::{
    io::{Read, Write},
    net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

/// Starts a proxy in front of `server` that delays each response by `delay`, and returns the
/// proxy's address.
///
/// The whole delay of a round trip is added on the way back. Each direction of a connection has its
/// own threads, because a timer of the runtime has a resolution of one millisecond.
pub fn in_front_of(server: SocketAddr, delay: Duration) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    let address = listener.local_addr().expect("an address");
    thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let Ok(server) = TcpStream::connect(server) else {
                continue;
            };
            for stream in [&client, &server] {
                stream.set_nodelay(true).expect("TCP_NODELAY");
            }
            let clone = |stream: &TcpStream| stream.try_clone().expect("a descriptor");
            pass(clone(&client), clone(&server), Duration::ZERO);
            pass(server, client, delay);
        }
    });
    address
}

fn pass(mut from: TcpStream, mut to: TcpStream, delay: Duration) {
    let (sender, receiver) = mpsc::channel::<(Instant, Vec<u8>)>();
    thread::spawn(move || {
        for (due, bytes) in receiver {
            thread::sleep(due.saturating_duration_since(Instant::now()));
            if to.write_all(&bytes).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
    });
    thread::spawn(move || {
        let mut buffer = vec![0; 64 * 1024];
        while let Ok(length @ 1..) = from.read(&mut buffer) {
            if sender
                .send((Instant::now() + delay, buffer[..length].to_vec()))
                .is_err()
            {
                break;
            }
        }
    });
}
