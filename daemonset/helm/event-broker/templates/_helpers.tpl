{{- define "event-broker.labels" -}}
app.kubernetes.io/name: event-broker
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "event-broker.image" -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag }}{{ end }}
{{- end }}

{{- define "event-broker.watched" -}}
{{ .Values.settings.watch_namespaces | default (list .Release.Namespace) | toJson }}
{{- end }}

{{- /* drain_deadline in whole seconds, and ten more to close what is left. */}}
{{- define "event-broker.graceSeconds" -}}
{{- $deadline := .Values.settings.drain_deadline | default "25s" }}
{{- $number := regexFind "^[0-9]+" $deadline | atoi }}
{{- if hasSuffix "ms" $deadline }}
{{- $number = div (add $number 999) 1000 }}
{{- else if hasSuffix "m" $deadline }}
{{- $number = mul $number 60 }}
{{- end }}
{{- add $number 10 }}
{{- end }}

{{- define "event-broker.busPort" -}}
{{ regexFind ":[0-9]+$" (urlParse .Values.settings.bus_url).host | trimPrefix ":" | default "443" }}
{{- end }}

{{- /* What was said, else the address in bus_url; a name has no addresses that a NetworkPolicy could ask for. */}}
{{- define "event-broker.busCidrs" -}}
{{- $host := (urlParse .Values.settings.bus_url).hostname }}
{{- $cidrs := .Values.networkPolicy.bus.cidrs }}
{{- if $cidrs }}
{{- toJson $cidrs }}
{{- else if contains ":" $host }}
{{- list (printf "%s/128" $host) | toJson }}
{{- else if regexMatch "^[0-9]+(\\.[0-9]+){3}$" $host }}
{{- list (printf "%s/32" $host) | toJson }}
{{- else }}
{{- fail (printf "networkPolicy.bus.cidrs: give the addresses of %s, or [0.0.0.0/0] for any" $host) }}
{{- end }}
{{- end }}

{{- /* What a schema can't say. It may have been skipped, so the one thing that breaks streams is here as well. */}}
{{- define "event-broker.check" -}}
{{- if ne (toString .Values.replicas) "1" }}
{{- fail "replicas: the router allows one session for each client_id, so a second pod would end the first one's streams; add an identity instead" }}
{{- end }}
{{- $names := list }}{{ $clients := list }}
{{- range .Values.identities }}
{{- $names = append $names .name }}
{{- $clients = append $clients (.clientId | default .name) }}
{{- end }}
{{- if ne (len $names) (len (uniq $names)) }}
{{- fail "identities: a name stands there twice" }}
{{- end }}
{{- if ne (len $clients) (len (uniq $clients)) }}
{{- fail "identities: a client_id stands there twice; each of the two brokers would end the other's session" }}
{{- end }}
{{- end }}
