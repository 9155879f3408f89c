//! Mainstay's gRPC API, compiled from `v1/*.proto`; `docs/reference/api.md` describes it.
//!
//! Additive only: `tests/it/additive.rs` compares it with `v1.snapshot`.
#![forbid(unsafe_code)]

pub mod json;

/// Package `mainstay.v1`: health, events, and the protocol between launcher and agent.
#[allow(
    missing_docs,
    clippy::all,
    clippy::allow_attributes_without_reason,
    reason = "generated; the documentation stands in the .proto files"
)]
pub mod v1 {
    tonic::include_proto!("mainstay.v1");
}

/// Package `grpc.health.v1`: the standard health checking protocol.
#[allow(
    missing_docs,
    clippy::all,
    clippy::allow_attributes_without_reason,
    reason = "generated; the documentation stands in the .proto file"
)]
pub mod grpc_health_v1 {
    tonic::include_proto!("grpc.health.v1");
}

/// Package `nvhcd`: the node health service as NVRx's launcher calls it.
#[allow(
    missing_docs,
    clippy::all,
    clippy::allow_attributes_without_reason,
    reason = "generated; the documentation stands in the .proto file"
)]
pub mod nvhcd {
    tonic::include_proto!("nvhcd");
}

/// Package `datamodels`: what NVSentinel's platform connector receives, a subset.
#[allow(
    missing_docs,
    clippy::all,
    clippy::allow_attributes_without_reason,
    reason = "generated; the documentation stands in the .proto file"
)]
pub mod datamodels {
    tonic::include_proto!("datamodels");
}

/// What libtpu serves inside a process that runs on TPUs: the client's side for the agent, the server's for tests.
#[allow(
    missing_docs,
    clippy::all,
    clippy::allow_attributes_without_reason,
    reason = "generated; the documentation stands in the .proto files"
)]
pub mod libtpu {
    pub mod tpu {
        pub mod monitoring {
            pub mod runtime {
                tonic::include_proto!("tpu.monitoring.runtime");
            }
        }
    }

    pub mod tpu_telemetry {
        tonic::include_proto!("tpu_telemetry");
    }
}

/// Our own API with the standard health protocol, NVRx's service and what they import, as an encoded
/// `google.protobuf.FileDescriptorSet`, for reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

/// What collectors of OpenTelemetry serve (OTLP): the client's side for the agent, the server's for tests.
#[allow(
    missing_docs,
    clippy::all,
    clippy::allow_attributes_without_reason,
    rustdoc::all,
    reason = "generated; the documentation stands in the .proto files"
)]
pub mod otlp {
    pub mod common {
        pub mod v1 {
            tonic::include_proto!("opentelemetry.proto.common.v1");
        }
    }

    pub mod resource {
        pub mod v1 {
            tonic::include_proto!("opentelemetry.proto.resource.v1");
        }
    }

    pub mod trace {
        pub mod v1 {
            tonic::include_proto!("opentelemetry.proto.trace.v1");
        }
    }

    pub mod metrics {
        pub mod v1 {
            tonic::include_proto!("opentelemetry.proto.metrics.v1");
        }
    }

    pub mod collector {
        pub mod trace {
            pub mod v1 {
                tonic::include_proto!("opentelemetry.proto.collector.trace.v1");
            }
        }

        pub mod metrics {
            pub mod v1 {
                tonic::include_proto!("opentelemetry.proto.collector.metrics.v1");
            }
        }
    }
}
