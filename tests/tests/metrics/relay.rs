//! Lets a TCP client use the socket of gpushd, because Prometheus 2.42 scrapes only TCP.

use std::{
    io,
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    thread,
};

/// Listens on a port of the loopback interface until the test ends. Connects each client with the socket. If gpushd does
/// not run, closes the connection. Returns the address.
pub(crate) fn relay(socket: &Path) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    let socket = PathBuf::from(socket);
    thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let Ok(server) = UnixStream::connect(&socket) else { continue };
            thread::spawn(move || forward(&client, &server));
        }
    });
    address
}

fn forward(client: &TcpStream, server: &UnixStream) -> Option<()> {
    let (mut requests, mut to_server) = (client.try_clone().ok()?, server.try_clone().ok()?);
    thread::spawn(move || {
        let _ = io::copy(&mut requests, &mut to_server);
        let _ = to_server.shutdown(Shutdown::Write);
    });
    let (mut answers, mut to_client) = (server, client);
    let _ = io::copy(&mut answers, &mut to_client);
    let _ = client.shutdown(Shutdown::Both);
    Some(())
}
