//! gpushctl against the real gpushd, and the documents whose commands are run as written.

mod api_page;
mod commands;
mod completion;
mod config_init;
mod documents;
mod hints;
mod json;
mod leases;
mod requests;
mod states;
mod support_bundle;
mod transcript;
mod verbs;
