//! Floor 4. How machines ask: gRPC and HTTP.
