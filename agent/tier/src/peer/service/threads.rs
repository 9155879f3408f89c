//! The threads of the service: they verify, ask, send and listen as long as it lives.

use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::os::{lower_priority, spawn};
use crate::peer::service::Shared;
use crate::peer::service::ask_pace::{self, AskPace};
use crate::peer::wire::Wire;
use crate::peer::{REPLICATE_NICE, server};

/// Time until an incomplete shard without new chunks is discarded.
const UPLOAD_TIMEOUT: Duration = Duration::from_secs(120);

/// Starts them.
pub(super) fn start(shared: &Arc<Shared>, listener: TcpListener) -> io::Result<()> {
    for (name, work) in [
        ("ckpt-verify", verify as fn(&Shared)),
        ("ckpt-ask", ask),
        ("ckpt-send", send),
        ("ckpt-ready", make_ready),
    ] {
        let shared = Arc::clone(shared);
        spawn(name, move || work(&shared))?;
    }
    let accepting = Arc::clone(shared);
    spawn("ckpt-listen", move || accept(&listener, &accepting))
}

fn verify(shared: &Shared) {
    lower_priority(19, true);
    shared.store.verify_all(|shard| {
        shared.count(|counts| counts.damaged += 1);
        tracing::warn!(
            run = %shard.key.run,
            step = shard.key.step,
            rank = shard.rank,
            "a replica was damaged and is deleted"
        );
    });
}

/// Prepares memory for the shards that are expected.
fn make_ready(shared: &Shared) {
    lower_priority(19, true);
    let mut seen = Vec::new();
    while let Some(sizes) = shared.signals.expected_other_than(&seen) {
        shared.store.prepare(&sizes, &|| !shared.stops());
        seen = sizes;
    }
}

/// Asks peers in turn as long as the service lives.
fn ask(shared: &Shared) {
    let mut pace = AskPace::default();
    while !shared.stops() {
        let changes = shared.signals.changes();
        let known: Vec<(String, bool)> =
            shared.peers().iter().map(|(name, peer)| (name.clone(), peer.alive)).collect();
        let spread = ask_pace::spread(shared.settings.interval, known.len());
        let has_leader = shared.has_leader();
        shared.ask_peers(&pace.next(known, has_leader && shared.copies().is_empty()), spread);
        shared.compare_shared_content();
        shared.withdraw_again();
        shared.expect();
        shared.store.sweep(UPLOAD_TIMEOUT);
        shared.collect();
        shared.signals.wake();
        pace.round(changes, has_leader && shared.is_settled());
        let until = Instant::now() + shared.settings.interval;
        while !shared.stops() && Instant::now() < until {
            std::thread::sleep(shared.settings.interval.min(Duration::from_millis(50)));
        }
    }
}

/// Sends shards with too few copies whenever something may have changed.
fn send(shared: &Shared) {
    // The threads that it starts, one for each connection, inherit this.
    lower_priority(REPLICATE_NICE, false);
    let (mut last, mut seen) = (Instant::now(), 0);
    loop {
        let nudged = shared.wait();
        if shared.stops() {
            return;
        }
        let stamp = shared.own.stamp_of_memory();
        if !nudged && last.elapsed() < shared.settings.interval && stamp == seen {
            continue;
        }
        let is_other = stamp != seen;
        (last, seen) = (Instant::now(), stamp);
        let had_shards = is_other && shared.own.has_shards();
        shared.own.look();
        // Launchers also change their memory at each start of their ranks; that is no change if no rank saves anything.
        if is_other && (had_shards || shared.own.has_shards()) {
            shared.signals.count_change();
        }
        // One at a time: each transfer may change what is needed next.
        while !shared.stops() {
            let Some(repair) = shared.next_repair() else { break };
            if !shared.throttle.allows() {
                // While it waits, a newer step may replace it.
                break;
            }
            let busy = shared.throttle.begin_to_send();
            shared.own.set_sending(Some(repair.shard.key.clone()));
            shared.repair(&repair);
            drop(busy);
            shared.own.look();
            shared.own.set_sending(None);
        }
    }
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    for stream in listener.incoming() {
        if shared.stops() {
            return;
        }
        let Ok(stream) = stream else {
            // Too many open files may be temporary; the loop must not spin.
            std::thread::sleep(Duration::from_millis(50));
            continue;
        };
        let host = stream.peer_addr().ok().map(|address| address.ip());
        let Some(slot) = shared.incoming.slots.take(host, shared.peers_at(host)) else { continue };
        let serving = Arc::clone(shared);
        let served = spawn("ckpt-peer", move || {
            let patience = serving.settings.patience;
            let (mut slot, mut is_greeted) = (slot, false);
            let talked = Wire::accept(stream, &serving.pass, patience).and_then(|mut wire| {
                slot.mark_authenticated();
                is_greeted = true;
                server::converse(&mut wire, &serving)
            });
            // A stored shard may change what has to be sent. A connection that failed after its greeting may have stored
            // something, too.
            let changed = *talked.as_ref().unwrap_or(&is_greeted);
            if let Err(error) = talked {
                if error.is_refusal() && serving.incoming.refusals.is_news(host, &error, Instant::now()) {
                    tracing::warn!(%error, "a connection was refused");
                } else {
                    tracing::debug!(%error, "a peer's connection ended");
                }
            }
            drop(slot);
            if changed {
                serving.changed();
            }
        });
        if let Err(error) = served {
            tracing::warn!(%error, "no thread for a peer's connection");
        }
    }
}
