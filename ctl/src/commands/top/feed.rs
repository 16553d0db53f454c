//! Sends the requests of an open top, so that the picture reacts to keys while gpushd answers.

use gpush_api::{ApiError, Lease, LeaseId, LeasePast};
use gpush_client::Client;
use tokio::sync::mpsc;

use super::{
    answers::{self, HostAnswers},
    ask::LeaseChange,
};
use crate::{exit::Failure, output::Output};

/// A request to gpushd.
#[derive(Debug)]
pub(super) enum Request {
    /// The figures and the leases.
    Figures,
    /// Everything.
    All,
    /// The past of a lease, before this top began.
    Past(LeaseId),
    Change(LeaseChange),
}

/// What gpushd answered.
#[derive(Debug)]
pub(super) enum Report {
    Answers(Box<Result<HostAnswers, ApiError>>),
    /// `None` if gpushd knows no past of the lease.
    Past(Option<Box<LeasePast>>),
    Changed(LeaseChange, Box<Result<Lease, ApiError>>),
}

/// Executes orders one after the other, until no more orders can come.
pub(super) async fn serve(
    client: &mut Client,
    selectors: &[String],
    out: &Output,
    mut last: HostAnswers,
    mut orders: mpsc::Receiver<Request>,
    reports: mpsc::Sender<Report>,
) {
    while let Some(order) = orders.recv().await {
        let read = match order {
            Request::Figures => answers::read_figures(client, &last, out).await,
            Request::All => answers::read_all(client, selectors, out).await,
            Request::Past(lease) => {
                let past = client.lease_past(lease).await.ok().map(Box::new);
                if reports.send(Report::Past(past)).await.is_err() {
                    return;
                }
                continue;
            }
            Request::Change(change) => {
                let changed = change.execute(client).await;
                let _ = reports.send(Report::Changed(change, Box::new(changed))).await;
                answers::read_all(client, selectors, out).await
            }
        };
        let answers = match read {
            Ok(answers) => {
                last = answers.clone();
                Ok(answers)
            }
            Err(Failure::Error(error)) => Err(*error),
            Err(Failure::BrokenPipe) => return,
        };
        if reports.send(Report::Answers(Box::new(answers))).await.is_err() {
            return;
        }
    }
}
