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

/// Pause before gpushctl tries again to reach gpushd after the connection was lost.
const RETRY: Duration = Duration::from_millis(200);

pub(super) async fn run(client: &mut Client, args: &args::EventsArgs, out: &Output) -> Outcome {
    let query = EventQuery { kinds: args.kinds.clone(), gpus: args.which.selectors(), after: None };
    // Read the GPUs to show their indexes. Ignore an error: there are events even without a driver.
    let gpus = if out.json { Vec::new() } else { client.gpus(false).await.unwrap_or_default() };
    if args.follow {
        // Begin the stream before reading the stored events, so that no event in between is missed.
        let stream = client.events(&query).await?;
        let has_past = args.since.is_some() || args.number.is_some();
        let past = if has_past { selected(client.kept_events(&query).await?, args, out.json) } else { Vec::new() };
        for reported in &past {
            print(reported, &gpus, out)?;
        }
        return follow(client, query, stream, &past, args.steps, &gpus, out).await;
    }
    let kept = selected(client.kept_events(&query).await?, args, out.json);
    if kept.is_empty() && out.is_drawn() {
        out.remark("No event since the start of gpushd matches.\n");
    }
    out.list(&kept, |look| events::list(&kept, &gpus, look))?;
    Ok(0)
}

/// Returns the stored events that the options select.
fn selected(mut kept: Vec<ReceivedEvent>, args: &args::EventsArgs, json: bool) -> Vec<ReceivedEvent> {
    kept.retain(|reported| shown(reported, args.steps || json));
    if let Some(since) = args.since {
        kept.retain(|reported| events::time(reported).is_none_or(|at| at >= since));
    }
    if let Some(number) = args.number {
        drop(kept.drain(..kept.len().saturating_sub(number)));
    }
    kept
}

/// Returns whether to show an event. By default, the steps of an operation are not shown: there are many steps, and the
/// events for the begin and the end of the operation are enough.
fn shown(reported: &ReceivedEvent, steps: bool) -> bool {
    steps || !events::is_step(reported)
}

/// Prints new events until Ctrl-C; `past` contains the events that were already printed. If the connection is lost,
/// waits for gpushd.
async fn follow(
    client: &mut Client,
    mut query: EventQuery,
    mut stream: EventStream,
    past: &[ReceivedEvent],
    steps: bool,
    gpus: &[Gpu],
    out: &Output,
) -> Outcome {
    loop {
        tell(&mut stream, past, steps || out.json, gpus, out).await?;
        query.after = stream.last_id().map(str::to_owned);
        out.remark("gpushd closed the stream of events; waiting until gpushd is back\n");
        stream = again(client, &query).await?;
        out.remark("gpushd is back\n");
    }
}

/// Prints events until the stream ends.
async fn tell(
    stream: &mut EventStream,
    past: &[ReceivedEvent],
    steps: bool,
    gpus: &[Gpu],
    out: &Output,
) -> Result<(), Failure> {
    while let Ok(Some(reported)) = stream.next().await {
        if shown(&reported, steps) && !past.contains(&reported) {
            print(&reported, gpus, out)?;
        }
    }
    Ok(())
}

fn print(reported: &ReceivedEvent, gpus: &[Gpu], out: &Output) -> Result<(), Failure> {
    if out.json { out.json_line(reported) } else { out.text(&events::line(reported, gpus, &out.look)) }
}

/// Waits for gpushd, and then continues the stream after the last event that gpushctl has received.
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

#[cfg(test)]
mod tests {
    use gpush_api::{Event, EventPayload, Resync, ResyncReason};
    use jiff::Timestamp;

    use super::*;
    use crate::args::{Cli, Command};

    fn arguments(words: &[&str]) -> args::EventsArgs {
        let cli = <Cli as clap::Parser>::try_parse_from([&["gpushctl", "events"], words].concat()).unwrap();
        let Command::Events(args) = cli.command else { panic!("{words:?}") };
        args
    }

    #[test]
    fn follow_begins_with_the_events_of_since_and_number() {
        let now = Timestamp::now();
        let event = |id: u32, seconds_ago: i64| {
            let at = now - jiff::SignedDuration::from_secs(seconds_ago);
            let what = EventPayload::Resync(Resync { reason: ResyncReason::OtherRun });
            ReceivedEvent::Known(Box::new(Event { id: format!("e-{id}"), at, what }))
        };
        let kept = vec![event(1, 7200), event(2, 60), event(3, 5)];
        let of = |words: &[&str]| selected(kept.clone(), &arguments(words), false);
        assert_eq!(of(&["-f", "--since", "5m"]), kept[1..]);
        assert_eq!(of(&["-f", "-n", "1"]), kept[2..]);
        assert_eq!(of(&["-f", "--since", "5m", "-n", "9"]), kept[1..]);
    }
}
