//! The connections of scrapers, with their limits. Each limit ends only the connection that exceeds it.

use std::{convert::Infallible, net::IpAddr, sync::Arc, time::Duration};

use hyper::{Request, body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::TlsAcceptor;

use super::{answers::RelayAnswers, response_deadline::ResponseDeadline, slots::Slots};

/// Maximum number of connections, in total and from one address.
const MOST_CONNECTIONS: (usize, usize) = (256, 128);

/// Maximum duration of a TLS handshake.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// Maximum time until the head of a request has arrived. An idle connection ends after the same time.
const REQUEST_HEAD: Duration = Duration::from_secs(10);

/// Maximum time in which a scraper receives a response.
const RESPONSE: Duration = Duration::from_secs(10);

/// Maximum size of the head of a request in bytes.
const LARGEST_HEAD: usize = 16 << 10;

/// Serves connections.
#[derive(Debug)]
pub(super) struct Connections {
    answers: Arc<RelayAnswers>,
    slots: Slots,
}

impl Connections {
    pub(super) fn new(answers: Arc<RelayAnswers>) -> Self {
        Self { answers, slots: Slots::new(MOST_CONNECTIONS.0, MOST_CONNECTIONS.1) }
    }

    /// Serves a connection in a new task. Closes the connection if there are too many.
    pub(super) fn begin(&self, stream: TcpStream, address: IpAddr) {
        let Some(slot) = self.slots.take(address) else { return };
        let answers = Arc::clone(&self.answers);
        tokio::spawn(async move {
            let stream = ResponseDeadline::new(stream, RESPONSE);
            match answers.settings().tls.clone() {
                // Errors of a connection concern only its scraper, which sees them.
                Some(config) => {
                    if let Ok(Ok(stream)) = timeout(HANDSHAKE, TlsAcceptor::from(config).accept(stream)).await {
                        serve(stream, answers, address).await;
                    }
                }
                None => serve(stream, answers, address).await,
            }
            drop(slot);
        });
    }
}

async fn serve(stream: impl AsyncRead + AsyncWrite + Unpin, answers: Arc<RelayAnswers>, address: IpAddr) {
    let service = service_fn(move |request: Request<Incoming>| {
        let answers = Arc::clone(&answers);
        async move { Ok::<_, Infallible>(answers.answer(request, address).await) }
    });
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(REQUEST_HEAD).max_buf_size(LARGEST_HEAD);
    drop(builder.serve_connection(TokioIo::new(stream), service).await);
}
