//! `gpushctl maintenance enter|leave` and `gpushctl recover`.

use gpush_api::{MaintenanceState, WhyRequest};
use gpush_client::Client;

use crate::{
    args::{Maintenance, Why},
    exit::Outcome,
    output::Output,
    render::host,
};

pub(super) async fn maintenance(client: &mut Client, command: Maintenance, out: &Output) -> Outcome {
    let state = match command {
        Maintenance::Status => MaintenanceState { maintenance: client.health().await?.maintenance },
        Maintenance::Enter(Why { reason }) => client.enter_maintenance(&WhyRequest { reason }).await?,
        Maintenance::Leave(Why { reason }) => client.leave_maintenance(&WhyRequest { reason }).await?,
    };
    out.show(&state, |look| host::maintenance(state.maintenance.as_ref(), look))?;
    Ok(0)
}

pub(super) async fn recover(client: &mut Client, Why { reason }: Why, out: &Output) -> Outcome {
    let recovered = client.recover(&WhyRequest { reason }).await?;
    // Only for the indexes of GPUs. The response has everything else.
    let gpus = if out.json { Vec::new() } else { client.gpus(false).await.unwrap_or_default() };
    out.show(&recovered, |look| host::recovered(&recovered, &gpus, look))?;
    Ok(0)
}
