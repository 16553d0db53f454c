//! `gpushctl audit`: who changed what.

use std::time::Duration;

use gpush_api::{AuditRecord, Gpu};
use gpush_client::{AuditQuery, Client};

use crate::{
    args,
    exit::{Failure, Outcome},
    output::Output,
    render::audit,
};

/// Number of records that gpushctl requests at once.
const PAGE: usize = 1000;

/// Interval at which `--follow` requests new records.
const POLL: Duration = Duration::from_secs(1);

pub(super) async fn run(client: &mut Client, args: &args::AuditArgs, out: &Output) -> Outcome {
    // Read the GPUs to show their indexes. Without a driver, the output shows UUIDs.
    let gpus = if out.json { Vec::new() } else { client.gpus(false).await.unwrap_or_default() };
    let mut objects: Vec<String> = args.object.clone().into_iter().collect();
    objects.extend(args.which.selectors());
    let object = (!objects.is_empty()).then(|| objects.join(","));
    let number = args.number.or_else(|| args.since.is_none().then_some(args::AUDIT_USUALLY));
    let mut query = AuditQuery { after: None, limit: number.unwrap_or(PAGE), object, since: args.since };
    let records = if number.is_some() {
        client.audit(&query).await?
    } else {
        query.after = Some(0);
        since(client, &mut query).await?
    };
    if args.follow {
        return follow(client, query, records, &gpus, out).await;
    }
    if records.is_empty() && out.is_drawn() {
        out.remark("No audit record matches.\n");
    }
    out.list(&records, |look| audit::records(&records, &gpus, look))?;
    Ok(0)
}

/// Returns all records after the record `query.after`. Requests them page by page.
async fn since(client: &mut Client, query: &mut AuditQuery) -> Result<Vec<AuditRecord>, Failure> {
    let mut records = Vec::new();
    query.limit = PAGE;
    loop {
        let page = client.audit(query).await?;
        query.after = page.last().map_or(query.after, |last| Some(last.sequence));
        let full = page.len() == PAGE;
        records.extend(page);
        if !full {
            return Ok(records);
        }
    }
}

/// Prints new records until Ctrl-C. If gpushd restarts, waits until gpushd answers again.
async fn follow(
    client: &mut Client,
    mut query: AuditQuery,
    mut records: Vec<AuditRecord>,
    gpus: &[Gpu],
    out: &Output,
) -> Outcome {
    // If there is no record yet, every later record is new.
    query.after = Some(records.last().map_or(0, |last| last.sequence));
    query.since = if records.is_empty() { Some(out.look.now) } else { None };
    if !out.json && out.look.headings {
        out.text(&audit::heading())?;
    }
    loop {
        if out.json {
            for record in &records {
                out.json_line(record)?;
            }
        } else {
            let lines: String = records.iter().map(|record| audit::line(record, gpus, &out.look)).collect();
            out.text(&lines)?;
        }
        tokio::time::sleep(POLL).await;
        records = match since(client, &mut query).await {
            Ok(records) => records,
            Err(Failure::Error(error)) if error.retryable || error.code == gpush_api::Code::Unreachable => Vec::new(),
            Err(failure) => return Err(failure),
        };
    }
}
