//! The subset of etcd's v3 API in `proto/`, as generated.
#![allow(missing_docs, clippy::all, reason = "generated; the .proto files have the comments")]

/// Keys, values and events.
pub mod mvccpb {
    tonic::include_proto!("mvccpb");
}

/// Requests, responses, clients and servers.
pub mod etcdserverpb {
    tonic::include_proto!("etcdserverpb");
}

/// Records of the built-in store's log.
pub mod log {
    tonic::include_proto!("coordlog");
}
