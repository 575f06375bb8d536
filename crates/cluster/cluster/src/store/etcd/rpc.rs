//! The messages of etcd's API version 3 that are used here.
//!
//! Names and numbers are those of etcd's `rpc.proto` and `kv.proto`. Unused fields are omitted: a
//! protobuf reader skips unknown fields, a writer omits zeros. The messages are written by hand so
//! that the build needs no protobuf compiler; `tests/` checks them against a real etcd.

use prost::{Message, Oneof};

/// The header of every response.
#[derive(Clone, PartialEq, Message)]
pub(super) struct ResponseHeader {
    #[prost(uint64, tag = "1")]
    pub(super) cluster_id: u64,
    #[prost(uint64, tag = "2")]
    pub(super) member_id: u64,
    #[prost(int64, tag = "3")]
    pub(super) revision: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct KeyValue {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
    #[prost(int64, tag = "3")]
    pub(super) mod_revision: i64,
    #[prost(bytes = "vec", tag = "5")]
    pub(super) value: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct RangeRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
    /// First key not included; empty: `key` alone.
    #[prost(bytes = "vec", tag = "2")]
    pub(super) range_end: Vec<u8>,
    #[prost(int64, tag = "3")]
    pub(super) limit: i64,
    /// The revision to read; 0: the latest.
    #[prost(int64, tag = "4")]
    pub(super) revision: i64,
    #[prost(bool, tag = "8")]
    pub(super) keys_only: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct RangeResponse {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<ResponseHeader>,
    #[prost(message, repeated, tag = "2")]
    pub(super) kvs: Vec<KeyValue>,
    #[prost(bool, tag = "3")]
    pub(super) more: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct PutRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) value: Vec<u8>,
    #[prost(int64, tag = "3")]
    pub(super) lease: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct DeleteRangeRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
}

/// One operation of a transaction.
#[derive(Clone, PartialEq, Message)]
pub(super) struct RequestOp {
    #[prost(oneof = "RequestOpKind", tags = "1, 2, 3")]
    pub(super) request: Option<RequestOpKind>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum RequestOpKind {
    #[prost(message, tag = "1")]
    Range(RangeRequest),
    #[prost(message, tag = "2")]
    Put(PutRequest),
    #[prost(message, tag = "3")]
    Delete(DeleteRangeRequest),
}

/// The result of one operation; only reads matter here.
#[derive(Clone, PartialEq, Message)]
pub(super) struct ResponseOp {
    #[prost(message, optional, tag = "1")]
    pub(super) range: Option<RangeResponse>,
}

/// A condition: the key's last change has this revision; 0: the key does not exist.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Compare {
    /// 0: equal.
    #[prost(int32, tag = "1")]
    pub(super) result: i32,
    #[prost(int32, tag = "2")]
    pub(super) target: i32,
    #[prost(bytes = "vec", tag = "3")]
    pub(super) key: Vec<u8>,
    /// Part of a oneof: written even if it is 0.
    #[prost(int64, optional, tag = "6")]
    pub(super) mod_revision: Option<i64>,
}

/// [`Compare::target`]: the revision of the last change.
pub(super) const TARGET_MOD: i32 = 2;

#[derive(Clone, PartialEq, Message)]
pub(super) struct TxnRequest {
    #[prost(message, repeated, tag = "1")]
    pub(super) compare: Vec<Compare>,
    #[prost(message, repeated, tag = "2")]
    pub(super) success: Vec<RequestOp>,
    #[prost(message, repeated, tag = "3")]
    pub(super) failure: Vec<RequestOp>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TxnResponse {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<ResponseHeader>,
    #[prost(bool, tag = "2")]
    pub(super) succeeded: bool,
    #[prost(message, repeated, tag = "3")]
    pub(super) responses: Vec<ResponseOp>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct CompactionRequest {
    #[prost(int64, tag = "1")]
    pub(super) revision: i64,
    #[prost(bool, tag = "2")]
    pub(super) physical: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct WatchRequest {
    #[prost(oneof = "WatchRequestKind", tags = "1, 3")]
    pub(super) request: Option<WatchRequestKind>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum WatchRequestKind {
    #[prost(message, tag = "1")]
    Create(WatchCreateRequest),
    /// Requests a progress notification.
    #[prost(message, tag = "3")]
    Progress(Empty),
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct WatchCreateRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) range_end: Vec<u8>,
    #[prost(int64, tag = "3")]
    pub(super) start_revision: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct WatchResponse {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<ResponseHeader>,
    #[prost(bool, tag = "3")]
    pub(super) created: bool,
    #[prost(bool, tag = "4")]
    pub(super) canceled: bool,
    /// Not 0: changes up to this revision are compacted.
    #[prost(int64, tag = "5")]
    pub(super) compact_revision: i64,
    #[prost(string, tag = "6")]
    pub(super) cancel_reason: String,
    #[prost(message, repeated, tag = "11")]
    pub(super) events: Vec<RpcEvent>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct RpcEvent {
    /// 0: put, 1: removed.
    #[prost(int32, tag = "1")]
    pub(super) kind: i32,
    #[prost(message, optional, tag = "2")]
    pub(super) kv: Option<KeyValue>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct LeaseGrantRequest {
    #[prost(int64, tag = "1")]
    pub(super) ttl: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct LeaseKeepAliveRequest {
    #[prost(int64, tag = "1")]
    pub(super) id: i64,
}

/// The response to a grant and to a keep-alive. An expired lease has no time left.
#[derive(Clone, PartialEq, Message)]
pub(super) struct LeaseResponse {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<ResponseHeader>,
    #[prost(int64, tag = "2")]
    pub(super) id: i64,
    #[prost(int64, tag = "3")]
    pub(super) ttl: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Empty {}

/// A member of the etcd cluster.
#[derive(Clone, PartialEq, Message)]
pub(super) struct RpcMember {
    #[prost(uint64, tag = "1")]
    pub(super) id: u64,
    #[prost(string, tag = "2")]
    pub(super) name: String,
    #[prost(string, repeated, tag = "3")]
    pub(super) peer_urls: Vec<String>,
    #[prost(string, repeated, tag = "4")]
    pub(super) client_urls: Vec<String>,
    #[prost(bool, tag = "5")]
    pub(super) is_learner: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct MemberAddRequest {
    #[prost(string, repeated, tag = "1")]
    pub(super) peer_urls: Vec<String>,
    #[prost(bool, tag = "2")]
    pub(super) is_learner: bool,
}

/// Names a member to remove or promote.
#[derive(Clone, PartialEq, Message)]
pub(super) struct MemberRequest {
    #[prost(uint64, tag = "1")]
    pub(super) id: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct MemberListRequest {
    /// Unknown to etcd before 3.5, which answers from its local state.
    #[prost(bool, tag = "1")]
    pub(super) linearizable: bool,
}

/// The response to adding, which also returns the new member, and to listing; they have the member
/// list under different tags.
#[derive(Clone, PartialEq, Message)]
pub(super) struct MemberListResponse {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<ResponseHeader>,
    #[prost(message, repeated, tag = "2")]
    pub(super) members: Vec<RpcMember>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct MemberAddResponse {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<ResponseHeader>,
    #[prost(message, optional, tag = "2")]
    pub(super) member: Option<RpcMember>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct StatusResponse {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<ResponseHeader>,
    #[prost(string, tag = "2")]
    pub(super) version: String,
    #[prost(int64, tag = "3")]
    pub(super) db_size: i64,
    /// 0: it knows none.
    #[prost(uint64, tag = "4")]
    pub(super) leader: u64,
    /// Alarms, and the lack of a leader.
    #[prost(string, repeated, tag = "8")]
    pub(super) errors: Vec<String>,
}
