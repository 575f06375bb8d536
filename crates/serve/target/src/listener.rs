//! Accepts connections at listeners, and begins them with the protocol of their listener.

use std::rc::Rc;
use std::time::Duration;

use rt::net::Listener;

use crate::iscsi::InitiatorConnection;
use crate::migration::{self, MigratableConnection};
use crate::nvme::HostConnection;
use crate::server::{Server, Service};

impl Server {
    /// Serves `service` on `listener`; stop by dropping the future. Connections remain.
    pub async fn serve(self: Rc<Self>, listener: Listener, service: Service) {
        match service {
            Service::Iscsi => self.accept::<InitiatorConnection>(listener).await,
            Service::Nvme => self.accept::<HostConnection>(listener).await,
        }
    }

    /// Accepts connections of protocol `P`; stop by dropping the future. Connections remain.
    async fn accept<P: MigratableConnection>(self: Rc<Self>, listener: Listener) {
        let service = P::SERVICE;
        loop {
            let (stream, peer) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    // No descriptors left, or a connection that broke in the queue: go on, slowly.
                    tracing::warn!(%service, %error, "cannot accept a connection");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            };
            if self.is_full(service, peer) {
                continue;
            }
            if let Ok(local) = stream.local_addr() {
                migration::begin::<P>(&self, stream, peer, local);
            }
        }
    }
}
