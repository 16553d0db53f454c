//! gpushd as a service: start and stop, sockets, access, HTTP, events, leases, the database, the
//! clock, journald, GPU states, background tasks, and limits of texts.

mod access;
mod admin_socket;
mod api_fuzz;
mod clock;
mod disk;
mod durable;
mod events;
mod fair_accept;
mod hangups;
mod http;
mod journald;
mod lease_attacks;
mod lease_queue;
mod leases;
mod lifecycle;
mod reports;
mod state_loss;
mod states;
mod tasks;
mod text_limits;
