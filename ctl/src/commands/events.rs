//! `gpushctl events`: the events that gpushd stores, or new ones until Ctrl-C.

use std::time::Duration;

use gpush_api::{Code, Gpu};
use gpush_client::{Client, Error, EventQuery, EventStream, Kind, ReceivedEvent};

use crate::{
    args,
    exit::{Failure, Outcome},
    output::Output,
    render::events,
};

/// Pause between two attempts to reach gpushd after the connection was lost.
const RETRY: Duration = Duration::from_millis(200);

pub(super) async fn run(client: &mut Client, args: &args::EventsArgs, out: &Output) -> Outcome {
    let query = EventQuery { kinds: args.kinds.clone(), gpus: args.which.selectors(), after: None };
    // The output shows the indexes of GPUs. A host without a driver has events too, so ignore an
    // error.
    let gpus = if out.json { Vec::new() } else { client.gpus(false).await.unwrap_or_default() };
    if args.follow {
        return follow(client, query, args.steps, &gpus, out).await;
    }
    let mut kept = client.kept_events(&query).await?;
    kept.retain(|told| shown(told, args.steps || out.json));
    if let Some(since) = args.since {
        kept.retain(|told| events::time(told).is_none_or(|at| at >= since));
    }
    if let Some(number) = args.number {
        drop(kept.drain(..kept.len().saturating_sub(number)));
    }
    if kept.is_empty() && out.is_drawn() {
        out.remark("No event since the start of gpushd matches.\n");
    }
    out.list(&kept, |look| events::list(&kept, &gpus, look))?;
    Ok(0)
}

/// Returns whether an event is shown. The steps of an operation are hidden by default, because
/// there are many of them, and the events for its begin and end are enough.
fn shown(told: &ReceivedEvent, steps: bool) -> bool {
    steps || !events::is_step(told)
}

/// Prints events until Ctrl-C. If the connection is lost, waits for gpushd.
async fn follow(client: &mut Client, mut query: EventQuery, steps: bool, gpus: &[Gpu], out: &Output) -> Outcome {
    let mut stream = client.events(&query).await?;
    loop {
        tell(&mut stream, steps || out.json, gpus, out).await?;
        query.after = stream.last_id().map(str::to_owned);
        out.remark("gpushd closed the stream; waiting until it is back\n");
        stream = again(client, &query).await?;
        out.remark("gpushd is back\n");
    }
}

/// Prints events until the stream ends.
async fn tell(stream: &mut EventStream, steps: bool, gpus: &[Gpu], out: &Output) -> Result<(), Failure> {
    while let Ok(Some(told)) = stream.next().await {
        if shown(&told, steps) {
            print(&told, gpus, out)?;
        }
    }
    Ok(())
}

fn print(told: &ReceivedEvent, gpus: &[Gpu], out: &Output) -> Result<(), Failure> {
    if out.json { out.json_line(told) } else { out.text(&events::line(told, gpus, &out.look)) }
}

/// Waits for gpushd and continues the stream after the last received event.
async fn again(client: &mut Client, query: &EventQuery) -> Result<EventStream, Error> {
    loop {
        match client.events(query).await {
            Err(error) if may_pass(&error) => tokio::time::sleep(RETRY).await,
            ended => return ended,
        }
    }
}

/// Returns whether an error may be temporary, because gpushd is starting, stopping or overloaded.
pub(super) fn may_pass(error: &Error) -> bool {
    match error.kind {
        Kind::Connect | Kind::Lost | Kind::TimedOut => true,
        Kind::Answer => error.error.retryable || error.code() == Code::Unavailable,
        Kind::Foreign => false,
    }
}
