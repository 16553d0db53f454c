//! `gpushctl events`: what happened lately, or what happens, for as long as somebody looks.

use std::time::Duration;

use gpush_api::Code;
use gpush_client::{Client, Error, EventQuery, EventStream, Kind, Told};

use crate::{
    args,
    exit::{Failure, Outcome},
    output::Output,
    render::events,
};

/// Between two tries to reach an agent that went away.
const RETRY: Duration = Duration::from_millis(200);

pub(super) async fn run(client: &mut Client, args: &args::EventsArgs, out: &Output) -> Outcome {
    let query = EventQuery { kinds: args.kinds.clone(), gpus: args.which.gpus.clone(), after: None };
    if args.follow {
        return follow(client, query, out).await;
    }
    let kept = client.kept_events(&query).await?;
    if out.json {
        return out.document(&kept).map(|()| 0);
    }
    if kept.is_empty() {
        out.remark("Nothing of the kind happened since gpushd started.\n");
    }
    out.text(&kept.iter().map(|told| events::line(told, &out.look)).collect::<String>())?;
    Ok(0)
}

/// Tells events until nobody reads them any more. An agent that goes away is waited for: nobody looks
/// after a monitor that has ended.
async fn follow(client: &mut Client, mut query: EventQuery, out: &Output) -> Outcome {
    let mut stream = client.events(&query).await?;
    loop {
        tell(&mut stream, out).await?;
        query.after = stream.place().map(str::to_owned);
        out.remark("gpushd has ended its events; going on when it is back\n");
        stream = again(client, &query).await?;
        out.remark("gpushd is back\n");
    }
}

/// Tells what comes until the stream ends, for whatever reason.
async fn tell(stream: &mut EventStream, out: &Output) -> Result<(), Failure> {
    while let Ok(Some(told)) = stream.next().await {
        print(&told, out)?;
    }
    Ok(())
}

fn print(told: &Told, out: &Output) -> Result<(), Failure> {
    if out.json { out.json_line(told) } else { out.text(&events::line(told, &out.look)) }
}

/// The stream from where it broke off, once there is an agent again.
async fn again(client: &mut Client, query: &EventQuery) -> Result<EventStream, Error> {
    loop {
        match client.events(query).await {
            Err(error) if may_pass(&error) => tokio::time::sleep(RETRY).await,
            ended => return ended,
        }
    }
}

/// Whether an agent that starts, stops or is overrun may be what is behind an error.
pub(super) fn may_pass(error: &Error) -> bool {
    match error.kind {
        Kind::Connect | Kind::Lost | Kind::TimedOut => true,
        Kind::Answer => error.error.retryable || error.code() == Code::Unavailable,
        Kind::Foreign => false,
    }
}
