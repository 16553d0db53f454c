//! gpushd as a service: start and stop, sockets, access, HTTP, events, leases, the database, the
//! clock, journald, GPU states, background tasks, limits of texts, and unknown fields.

mod access;
mod admin_socket;
mod api_fuzz;
mod change_limits;
mod clock;
mod described_requests;
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
mod states;
mod subordinate_uids;
mod tasks;
mod text_limits;
mod unknown_fields;
