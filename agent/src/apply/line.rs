//! An operation that can't begin yet: another one has its GPUs, or instances in its way are in use.
//!
//! ```text
//! queued ─► its turn ─► read and plan ─┬─ every plan stands ──► start: running
//!    ▲                                 ├─ instances in use ───► waiting, GPUs let go ─┐
//!    │                                 └─ refused for good ───► rolled back           │ a pause
//!    └───────────────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! It holds nothing while it waits: GPUs in use are no reason to keep others from changing them.
//! It goes on after a restart of gpushd. Nothing of it was done before it starts, so it can be
//! cancelled without a trace, and its end before then is `rolled_back`.

use std::{sync::Arc, time::Duration};

use gpush_api::{ApiError, Code, OperationState};
use gpush_core::desired::plan_host;
use jiff::Timestamp;

use super::{
    begin::{Order, Ready, intent, may_pass},
    carry_out::{self, cancelled, carry_out, finish},
};
use crate::{agent::Shared, auth::Asker, operation::Ongoing, view};

/// Between two looks at instances that are in use. The driver tells nobody when they become idle.
const LOOK: Duration = Duration::from_secs(1);

/// How a stand in line ends before it begins.
enum Left {
    /// The agent stops; the next one goes on.
    Stopping,
    /// It is not to be, or can't be.
    Over(ApiError),
}

/// Waits in the background, then carries the operation out.
pub(super) fn spawn(agent: &Shared, ongoing: Arc<Ongoing>, order: Order, since: Timestamp) {
    carry_out::in_background(agent, ongoing, move |agent, ongoing| async move {
        stand(&agent, ongoing, order, since).await;
    });
}

/// Stands in line since `since`.
pub(super) async fn stand(agent: &Shared, ongoing: Arc<Ongoing>, order: Order, since: Timestamp) {
    let patience = order.wait.unwrap_or_default();
    let spent = Duration::try_from(Timestamp::now().duration_since(since)).unwrap_or_default();
    let mut last = None;
    let begun = tokio::select! {
        begun = turn(agent, &ongoing, &order, &mut last) => begun,
        () = tokio::time::sleep(patience.saturating_sub(spent)) => Err(Left::Over(too_long(&ongoing.id(), patience))),
        () = ongoing.cancelled().cancelled() => Err(Left::Over(cancelled(&ongoing.id()))),
        () = agent.stopping.cancelled() => Err(Left::Stopping),
    };
    match begun {
        Ok(Ready { parts, claim }) => {
            let plans = parts.iter().map(|part| part.plan.clone()).collect();
            match ongoing.start(claim, intent(&order, &parts), plans).await {
                Ok(()) => carry_out(agent, ongoing, &parts).await,
                Err(error) => finish(agent, ongoing, &[], OperationState::RolledBack, Some(error)).await,
            }
        }
        Err(Left::Stopping) => {}
        Err(Left::Over(mut error)) => {
            let waited_for: Option<ApiError> = last;
            error.causes.extend(waited_for.into_iter().flat_map(|last| [vec![last.message], last.causes].concat()));
            let error = error.outcome("nothing of it was done");
            finish(agent, ongoing, &[], OperationState::RolledBack, Some(error)).await;
        }
    }
}

fn too_long(id: &str, patience: Duration) -> ApiError {
    ApiError::new(Code::TimedOut, format!("operation {id} could not begin within {} s", patience.as_secs()))
        .hint("end what is in its way, or ask for it with a longer --wait")
        .retryable()
}

/// Waits until the operation can begin. `last` is why it could not so far.
async fn turn(agent: &Shared, ongoing: &Ongoing, order: &Order, last: &mut Option<ApiError>) -> Result<Ready, Left> {
    // What it waits for is read by everybody, so it is seen with nobody's eyes.
    let nobody = Asker::agent();
    loop {
        let refused = match once(agent, ongoing, order, &nobody).await {
            Ok(ready) => return Ok(ready),
            Err(error) => error,
        };
        let passes = may_pass(&refused) || refused.code == Code::DriverUnavailable;
        if !passes {
            return Err(Left::Over(refused));
        }
        if last.as_ref().is_none_or(|last| last.causes != refused.causes) {
            let causes: String = refused.causes.iter().map(|cause| format!("; {cause}")).collect();
            ongoing.note(format!("waits: {}{causes}", refused.message));
        }
        *last = Some(refused);
        if ongoing.snapshot().state == OperationState::Queued
            && let Err(error) = ongoing.advance(OperationState::Waiting).await
        {
            return Err(Left::Over(error));
        }
        tokio::time::sleep(LOOK).await;
    }
}

async fn once(agent: &Shared, ongoing: &Ongoing, order: &Order, asker: &Asker) -> Result<Ready, ApiError> {
    let gpus = view::gpus(agent, asker).await?;
    let meant = plan_host(&agent.settings.config(), &gpus, &order.request)?.plans;
    let uuids: Vec<String> = meant.iter().map(|plan| plan.uuid.clone()).collect();
    let claim = agent.operations.claim_in_turn(&uuids, ongoing).await;
    Ready::look(agent, asker, order, &meant, claim).await
}
